"""Data: reads files into silos' rows, divides them into splits and silos, tokenizes them and cuts batches.

In order of use: `readers` (CSV, TSV, JSON lines, Parquet), `folders` and `hub` (labeled data sets), `instructions` and
`conversations` (generation data), `own_silos` (the user's files), `splits` and `partition` (silos), `loading` (from the
configuration to all silos), `backdoor` and `server_rows` (attacks and semi-supervision), `templates`, `chat_template`,
`chat_rows`, `generation_tokenizer` and `tokenized` (token ids), `batching` and `cohort_batches` (micro-batches),
`metrics`. `row_folder` stores a silo's rows for its own process.
"""
