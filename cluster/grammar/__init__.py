"""Grammars over a model's tokens: compiling, matching, and a check that no grammar can hold up."""
