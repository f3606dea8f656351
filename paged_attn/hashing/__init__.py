"""What a model, its code and its tensors are, as text that is equal in two processes exactly if they are."""
