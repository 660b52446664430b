# SPDX-License-Identifier: MIT
"""The published rules by name, each one expression over the four choices.

A preset validates only what the choices that it combines do not.

===========  ===========================================================================
module       rules
===========  ===========================================================================
`fixed`      with a fixed limit: by value, by norm, for groups, normalized
`relative`   relative to the parameters
`adaptive`   with limits that follow the norms of earlier steps
`examples`   for gradients of single examples
===========  ===========================================================================
"""
