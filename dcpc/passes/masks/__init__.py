"""Recognises attention masks as limits of positions, kept keys and packed sequences."""
