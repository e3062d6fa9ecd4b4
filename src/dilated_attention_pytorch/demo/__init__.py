"""A first look at the library on one's own machine, written up as a report."""
