"""The rules between settings: which contradict each other (`Rule`), and which have no effect beside others
(`Requirement`)."""
