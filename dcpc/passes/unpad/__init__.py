"""Which values of a padded batch need be computed for its valid rows alone."""
