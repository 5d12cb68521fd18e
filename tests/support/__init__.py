"""What the tests of several rooms share.

Data and models:
    tiny: tiny encoders, tiny tasks, and the words that turn the preset `demo` into a run of seconds.
    language_models: tiny masked, causal and sequence-to-sequence language models with their tokenizers.
    tuner_families: a tiny model of every backbone family, and every tuner with options.
    old_runs: recorded run folders.
    proof: final states of all methods under all tuners, messages and tables, as recorded.

Runs:
    federate: fixtures that run the cases of `method_cases` over one loaded backbone.
    method_cases: every method as a case, short runs of it, and the messages that passed in them.
    small_runs: finished runs of several families and tuners, and their states for comparison.
    report_runs: run folders with known numbers, written without a run.
    session_rig: a federation over sessions in this process, without Flower.
    deployed: a federation of processes on 127.0.0.1 with certificates, keys and a proxy.
    proxies: an HTTP proxy with CONNECT and a password.
    processes: the real command as a process, and the processes that it has started.
    command_line: the command line in this process, and small federations of CSV files.

Parts of a run:
    fedmcp_rig: FedMCP in float64 with random parts.
    numeric_rig: federations in float64, random states, and one `Step` made of its parts.
    views: a batch's views for tests.
    small_messages: a coordinator that expects three small tensors, and messages for it.
    uplink_changes: small updates, and uplink pipelines.

Computations by hand:
    by_hand: losses, similarities, heads and BERT's forward in NumPy and plain torch, without silotune.
    rounds_by_hand: whole local rounds by the functions of `by_hand`.
"""
