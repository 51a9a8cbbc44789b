"""Programs that are running: what each holds, the leases on its pages, and when it comes back."""
