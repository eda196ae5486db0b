"""What people see: objects in notebooks, and progress."""
