"""Views as signatures have them."""


def typed(view: type, pointer: str):
    """A view of a tensor whose strides are 32-bit integers, e.g. typed(Matrix, "*bf16")."""
    return view(pointer, *["i32"] * (len(view._fields) - 1))


def signature_of(kernel, types: dict, constants: dict) -> tuple[dict, dict]:
    """A kernel's signature and constexprs: its arguments as `types` names them, else 32-bit integers.

    constants: what is compiled into the kernel, where it takes it; "x.item" is a field of the view x.
    """
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    constexprs = {}
    for name, value in constants.items():
        argument, _, field = name.partition(".")
        if argument not in signature:
            continue
        place = (kernel.arg_names.index(argument),)
        if field:
            view = signature[argument]
            place, signature[argument] = (*place, view._fields.index(field)), view._replace(**{field: "constexpr"})
        else:
            signature[argument] = "constexpr"
        constexprs[place] = value
    return signature, constexprs
