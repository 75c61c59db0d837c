"""A pretrained Transformer, fine-tuned privately: the model, its weights and tokenizer, and the task of the suite."""
