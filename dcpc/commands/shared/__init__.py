"""What commands share: options, models and functions named as text."""
