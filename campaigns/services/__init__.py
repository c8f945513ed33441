"""Every write of campaigns, a module per noun or verb; the doors import what they need from the module itself."""
