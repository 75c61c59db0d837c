"""A pretrained Transformer, fine-tuned privately: the model, its weights and tokens, and what the suite trains."""
