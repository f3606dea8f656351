"""What `explain` and `attention_layers` tell, as data and as text."""
