"""Training: client models over one base model, datums, losses and packed rows. No HTTP, no queue."""
