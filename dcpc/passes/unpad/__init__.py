"""Decides which values of a padded batch are computed for its valid rows alone."""
