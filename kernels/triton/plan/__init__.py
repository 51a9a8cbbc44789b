"""Host-side planning of attention launches: tiles, work items, cascade groups and graph buffers."""
