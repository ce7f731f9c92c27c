"""What differs between the releases of torch that dcpc supports, chosen by feature."""
