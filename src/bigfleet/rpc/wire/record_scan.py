"""Locates groups of fields in many serialized machines at once, with NumPy.

Nearly every record of a large List has its fields in the order of their numbers, and short ones. Such a record is cut
into its id, its state, its host, its facts (which many machines share), its binding and its node name. More facts may
follow: our own provider appends what all machines of a kind share (`encode_list_entry`). Any other record is left to
the plain reader. One step handles one field of all records. The scan does not interpret a field.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Places = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

#: Bytes behind the last record that may be looked at.
PADDING: Final = 8
#: Fields of one record; one with more is not cut.
_FIELDS_MAX: Final = 96

_VARINT, _FIXED64, _LENGTH_DELIMITED = 1, 2, 3
_ID, _STATE, _HOST, _FACTS, _BINDING, _NODE, _MORE_FACTS = range(1, 8)
_SINGLE: Final = (_ID, _STATE, _HOST, _NODE)
#: By first byte of the tag (provider.proto, Machine): the group, and how the field is written.
_FIELDS: Final = {
    0x0A: (_ID, _LENGTH_DELIMITED),
    0x10: (_STATE, _VARINT),
    0x1A: (_HOST, _LENGTH_DELIMITED),
    0x22: (_FACTS, _LENGTH_DELIMITED),  # instance_type
    0x2A: (_FACTS, _LENGTH_DELIMITED),  # zone
    0x30: (_FACTS, _VARINT),  # capacity_type
    0x39: (_FACTS, _FIXED64),  # price_per_hour
    0x41: (_FACTS, _FIXED64),  # interruption_probability
    0x4A: (_FACTS, _LENGTH_DELIMITED),  # resources
    0x52: (_FACTS, _LENGTH_DELIMITED),  # labels
    0x6A: (_FACTS, _LENGTH_DELIMITED),  # allocatable
    0x72: (_BINDING, _LENGTH_DELIMITED),  # cluster
    0x7A: (_BINDING, _LENGTH_DELIMITED),  # shard_metadata
    0xA2: (_NODE, _LENGTH_DELIMITED),  # node_name, 0xA2 0x06
}
_LONG_TAG, _LONG_TAG_END = 0xA2, 0x06
_PROVIDER_TAG, _REF_TAG = 0x0A, 0x12
_ONE_BYTE: Final = 0x80

_GROUP_OF = np.zeros(256, np.int8)
_KIND_OF = np.zeros(256, np.int8)
for _tag, (_group, _kind) in _FIELDS.items():
    _GROUP_OF[_tag], _KIND_OF[_tag] = _group, _kind
_IS_SINGLE = np.isin(np.arange(_MORE_FACTS + 1), _SINGLE)
#: Bytes of a field's content that has no length of its own.
_SIZE_OF = np.where(_KIND_OF == _VARINT, 1, 8)


class Span(NamedTuple):
    """Where something of each record begins and ends; empty where the record does not have it."""

    starts: Places
    ends: Places


class Cut(NamedTuple):
    """The parts of some records."""

    #: Whether the record could be cut; where not, its other entries mean nothing.
    is_cut: Mask
    #: The id's characters.
    ids: Span
    #: The whole fields.
    states: Span
    facts: Span
    bindings: Span
    #: Facts behind the node name.
    more_facts: Span
    #: The whole field of the host's provider.
    providers: Span
    #: The host reference's characters behind their number, one byte.
    refs: Span
    #: The node name's characters.
    node_names: Span


def cut_records(content: npt.NDArray[np.uint8], starts: Places, ends: Places) -> Cut:
    """Cut records, each from its start to its end; `PADDING` bytes more are there behind the last."""
    reached, is_cut = _reached(content, starts, ends)
    is_cut &= reached[_ID] > starts
    hosts = Span(reached[_STATE], reached[_HOST])
    providers, refs, is_sound = _host(content, hosts)
    # Tag and length have one byte each, of the node name three in all.
    id_starts, node_starts = starts + 2, np.minimum(reached[_BINDING] + 3, reached[_NODE])
    return Cut(
        is_cut=is_cut & is_sound,
        ids=Span(id_starts, reached[_ID]),
        states=Span(reached[_ID], reached[_STATE]),
        facts=Span(reached[_HOST], reached[_FACTS]),
        bindings=Span(reached[_FACTS], reached[_BINDING]),
        more_facts=Span(reached[_NODE], reached[_MORE_FACTS]),
        providers=providers,
        refs=refs,
        node_names=Span(node_starts, reached[_NODE]),
    )


def _reached(content: npt.NDArray[np.uint8], starts: Places, ends: Places) -> tuple[Places, Mask]:
    """Return by group where it ends in each record, and whether the record is fields in order up to its end."""
    reached: Places = np.repeat(starts[np.newaxis], _MORE_FACTS + 1, axis=0)
    is_sound = np.ones(len(starts), np.bool_)
    position, group_before = starts.copy(), np.zeros(len(starts), np.int8)
    left = np.flatnonzero(position < ends)
    for _field in range(_FIELDS_MAX):
        if not len(left):
            break
        at = position[left]
        tag = content[at]
        group, kind, before = _GROUP_OF[tag], _KIND_OF[tag], group_before[left]
        group = np.where((group == _FACTS) & (before > _FACTS), _MORE_FACTS, group)
        is_long = tag == _LONG_TAG
        at += 1
        is_wrong = is_long & (content[at] != _LONG_TAG_END)
        at += is_long
        first = content[at]
        has_length, is_longer = kind == _LENGTH_DELIMITED, first >= _ONE_BYTE
        second = content[at + 1].astype(np.int64)
        length = np.where(is_longer, (first & (_ONE_BYTE - 1)) | (second << 7), first)
        at += np.where(has_length, 1 + is_longer + length, _SIZE_OF[tag])
        single = _IS_SINGLE[group]
        is_wrong |= (group == 0) | (group < before) | (single & (group == before)) | (at > ends[left])
        # A number of more than one byte, a length of more than two, and a long text of its own.
        is_wrong |= is_longer & (single | (kind == _VARINT) | (has_length & (second >= _ONE_BYTE)))
        is_sound[left[is_wrong]] = False
        is_right = ~is_wrong
        left, at, group = left[is_right], at[is_right], group[is_right]
        position[left], group_before[left] = at, group
        reached[group, left] = at
        left = left[at < ends[left]]
    is_sound[left] = False
    return np.maximum.accumulate(reached, axis=0), is_sound


def _host(content: npt.NDArray[np.uint8], hosts: Span) -> tuple[Span, Span, Mask]:
    """Return where provider and reference stand in each host field, and whether it holds nothing else."""
    has_host = hosts.ends > hosts.starts
    inner = np.minimum(hosts.starts + 2, hosts.ends)
    has_provider = has_host & (inner < hosts.ends) & (content[inner] == _PROVIDER_TAG)
    provider_length = content[inner + 1]
    is_sound = ~(has_provider & (provider_length >= _ONE_BYTE))
    provider_ends = inner + np.where(has_provider, 2 + provider_length.astype(np.int64), 0)
    # Where the provider ends behind the host, no place in it is looked at.
    is_sound &= provider_ends <= hosts.ends
    provider_ends = np.minimum(provider_ends, hosts.ends)
    has_ref = has_host & (provider_ends < hosts.ends)
    ref_starts = provider_ends + has_ref
    ref_length = content[ref_starts]
    ref_ends = ref_starts + np.where(has_ref, 1 + ref_length.astype(np.int64), 0)
    is_sound &= ~has_ref | ((content[provider_ends] == _REF_TAG) & (ref_length < _ONE_BYTE) & (ref_ends == hosts.ends))
    return Span(inner, provider_ends), Span(ref_starts, np.minimum(ref_ends, hosts.ends)), is_sound
