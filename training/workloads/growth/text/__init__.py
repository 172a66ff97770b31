"""Text as a dataset: made and imported where the tokenizer library is, read everywhere."""
