"""Sessions: their cells, their life and sleep, who owns them and how many there may be."""
