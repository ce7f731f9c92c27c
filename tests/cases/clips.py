"""Inputs of an STDiT of 12 text tokens of width 32, in pairs of rows of patches."""

CLIPS = {
    "latents": "float32[batch, 4, frames, tokens*2, 2]",
    "noise": "float32[batch, 4, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "float32[batch, 12, 32]",
    "text_mask": "bool[batch, 12]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}
