"""The engines that a head can be exported to, and the options that each reads. Standard library only."""

ENGINES = ("vllm", "sglang", "speculators", "safeailab")
METHODS_FOR_OPTION = {  # options that not all of them read
    "total_token": ("sglang", "safeailab"),
    "top_k": ("sglang", "safeailab"),
    "num_speculative_tokens": ("vllm", "speculators"),
    "tensor_parallel_size": ("vllm", "sglang", "speculators"),
}
