"""Other people's models and frameworks: their checkpoints, and this library's attention inside them."""
