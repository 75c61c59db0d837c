"""A pretrained Transformer, fine-tuned privately: the model, its weights and tokens, and the suite that compares ways."""
