"""What tools/train_demo.py runs: the corpus, the recipe and the training of the embedded checkpoint."""
