"""The host side: requests, pages, the scheduler, and the runner that owns the device state."""
