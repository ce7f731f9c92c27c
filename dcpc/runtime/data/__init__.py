"""From a dataset of ragged samples to planned optimizer steps."""
