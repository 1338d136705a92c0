"""What a client sees: tools, resources, instructions, and the words of their answers."""
