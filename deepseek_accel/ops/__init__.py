"""What is computed: for each op its contract, a torch reference, and the choice of an implementation by device."""
