import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "eagle_triton/__init__.py").read_text(), re.MULTILINE).group(1)

setup(
    name="eagle_triton",
    version=VERSION,
    description="Triton kernels for EAGLE speculative decoding, put in and taken out by one call each",
    author="eagle_triton contributors",
    license="MIT",
    packages=find_packages(include=["eagle_triton", "eagle_triton.*"]),
    package_data={
        "eagle_triton": [*(f"demo/**/*.{suffix}" for suffix in ("json", "safetensors", "txt")), "speculative/*.json"]
    },
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "triton>=3.4; sys_platform == 'linux' and platform_machine in 'x86_64 aarch64'",
        "triton-windows>=3.4; sys_platform == 'win32' and platform_machine == 'AMD64'",
        "transformers>=4.53,<6",
        "accelerate>=1.0",
        "safetensors>=0.4.3",
        "tqdm>=4.66",
    ],
    extras_require={
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100"],
        "benchmark": ["matplotlib>=3.8"],
        "dev": ["ruff>=0.9"],
    },
)
