"""What is done before training: lengths measured from image headers, and rows planned and stored ahead."""
