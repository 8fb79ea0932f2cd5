"""The tests of device arrays, each a module that runs in a process of its own."""

#: They run on the tests' own driver too.
ANYWHERE = (
    "on_device",
    "on_layouts",
    "on_messages",
    "on_first_messages",
    "on_staged_messages",
    "on_jax",
    "on_failures",
    "on_hosts",
    "on_registered",
    "on_codes",
)
#: In on_torch the host reads that driver's memory as its own. on_page has never run elsewhere.
ON_FAKES = (*ANYWHERE, "on_torch", "on_page")
#: On hardware this would take two hosts.
ON_CARDS = "on_direct"
#: These need libraries that know a real device.
ON_GPUS = (*ANYWHERE, "on_frameworks")
