"""The program eagle-triton."""
