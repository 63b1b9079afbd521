"""Who takes a head, and which options each reads. The standard library alone."""

ENGINES = ("vllm", "sglang", "speculators", "safeailab")
METHODS_FOR_OPTION = {  # of the options that not all of them read
    "total_token": ("sglang", "safeailab"),
    "top_k": ("sglang", "safeailab"),
    "num_speculative_tokens": ("vllm", "speculators"),
    "tensor_parallel_size": ("vllm", "sglang", "speculators"),
}
