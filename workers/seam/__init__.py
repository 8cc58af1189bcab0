"""The seam between Overstory and SGLang: all changes to SGLang's behaviour, made from outside."""
