"""Texts, reviews and downloads; tokenizers; the order of the items; word vectors."""
