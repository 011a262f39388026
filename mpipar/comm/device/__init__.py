"""Arrays on a device: what they are, and how calls on them are carried out."""
