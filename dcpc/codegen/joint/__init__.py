"""Forward and backward as one graph, and what each of them keeps."""
