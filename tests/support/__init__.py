"""What integration, fault and browser tests share."""
