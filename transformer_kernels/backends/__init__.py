"""What all operations of a backend share: how it is found, loaded or built, and why it cannot be."""
