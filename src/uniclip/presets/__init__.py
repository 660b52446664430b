# SPDX-License-Identifier: MIT
"""The published rules by name, each one expression over the four choices.

===========  ===========================================================================
module       rules
===========  ===========================================================================
`fixed`      with a fixed limit: by value, by norm, for groups, normalized
`relative`   relative to the parameters
`adaptive`   adaptive: they learn from the norms of earlier steps
`examples`   for gradients of single examples
===========  ===========================================================================
"""
