"""The corpus, the recipe and the training of the embedded checkpoint, for tools/train_demo.py."""
