"""Views as signatures have them."""


def typed(view: type, pointer: str):
    """A view of a tensor whose strides are 32-bit integers, e.g. typed(Matrix, "*bf16")."""
    return view(pointer, *["i32"] * (len(view._fields) - 1))
