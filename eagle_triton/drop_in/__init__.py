"""What takes the place of an EaModel's methods: one module per family, and the parts that families share."""
