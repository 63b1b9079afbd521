"""What takes the place of an EaModel's methods, and the patch that sets it there and takes it out again."""
