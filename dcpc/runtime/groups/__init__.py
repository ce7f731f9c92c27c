"""Process groups, and how ranks agree and send each other plans."""
