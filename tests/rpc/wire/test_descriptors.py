"""Generated code, the table kept in these tests, and docs/spec/wire.md say the same about every byte of the wire."""

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from bigfleet.rpc.wire.gen import capacity_pb2, coordinator_pb2, provider_pb2, shard_pb2, shardadmin_pb2, shardread_pb2
from tests.rpc.wire import wire_table
from tests.rpc.wire.wire_fields import Fields
from tests.rpc.wire.wire_spec import read_spec

FILES: dict[str, FileDescriptor] = {
    "capacity": capacity_pb2.DESCRIPTOR,
    "coordinator": coordinator_pb2.DESCRIPTOR,
    "provider": provider_pb2.DESCRIPTOR,
    "shard": shard_pb2.DESCRIPTOR,
    "shardread": shardread_pb2.DESCRIPTOR,
    "shardadmin": shardadmin_pb2.DESCRIPTOR,
}

SCALARS = {
    FieldDescriptor.TYPE_STRING: "str",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT32: "i32",
    FieldDescriptor.TYPE_INT64: "i64",
    FieldDescriptor.TYPE_DOUBLE: "dbl",
}


def all_fields() -> dict[str, Fields]:
    """The hand-kept fields of all files in one table."""
    return {name: fields for messages in wire_table.MESSAGES.values() for name, fields in messages.items()}


def messages_of(file: FileDescriptor) -> dict[str, Descriptor]:
    """Top-level messages; any nested one must be the entry of a map."""
    for message in file.message_types_by_name.values():
        assert all(nested.GetOptions().map_entry for nested in message.nested_types), message.full_name
    return dict(file.message_types_by_name)


def enums_of(file: FileDescriptor) -> list[EnumDescriptor]:
    nested = [enum for message in file.message_types_by_name.values() for enum in message.enum_types]
    return [*file.enum_types_by_name.values(), *nested]


def short(full_name: str) -> str:
    prefix = f"{wire_table.PACKAGE}."
    assert full_name.startswith(prefix), full_name
    return full_name.removeprefix(prefix)


def type_of(field: FieldDescriptor) -> str:
    """The type in the notation of the specification."""
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        key, value = (type_of(message.fields_by_name[part]) for part in ("key", "value"))
        return f"{{{key}:{value}}}"
    if message is not None:
        name = short(message.full_name)
    elif field.enum_type is not None:
        name = short(field.enum_type.full_name)
    else:
        name = SCALARS[field.type]
    return f"*{name}" if field.is_repeated else name


def reserved_of(message: Descriptor) -> tuple[int, ...]:
    proto = descriptor_pb2.DescriptorProto()
    message.CopyToProto(proto)
    assert not proto.reserved_name
    return tuple(number for span in proto.reserved_range for number in range(span.start, span.end))


def real_oneofs(message: Descriptor) -> dict[str, tuple[str, ...]]:
    return {oneof.name: tuple(field.name for field in oneof.fields) for oneof in message.oneofs}


def test_files_keep_package_and_path() -> None:
    """Every descriptor carries the import path and package that peers know, not those of the Python package."""
    expected = {name: (f"bigfleet/v1alpha1/{name}.proto", "bigfleet.v1alpha1") for name in wire_table.MESSAGES}

    assert expected == {name: (file.name, file.package) for name, file in FILES.items()}


def test_fields_equal_the_table() -> None:
    """Names, numbers and types of all fields of all messages are those of the table, in the file that it says."""
    generated = {
        file: {
            name: {field.name: (field.number, type_of(field)) for field in message.fields}
            for name, message in messages_of(descriptor).items()
        }
        for file, descriptor in FILES.items()
    }

    assert generated == wire_table.MESSAGES


def test_oneofs_equal_the_table() -> None:
    """The oneofs and their members are those of the table, and no field is `optional`."""
    generated = {
        name: oneofs
        for descriptor in FILES.values()
        for name, message in messages_of(descriptor).items()
        if (oneofs := real_oneofs(message))
    }

    assert generated == wire_table.ONEOFS


def test_reserved_numbers_equal_the_table() -> None:
    """Numbers that were given up stay reserved, and no others are."""
    generated = {
        name: reserved
        for descriptor in FILES.values()
        for name, message in messages_of(descriptor).items()
        if (reserved := reserved_of(message))
    }

    assert generated == wire_table.RESERVED


def test_enums_equal_the_table() -> None:
    """Names and numbers of all enum values are those of the table; no value is an alias."""
    enums = [enum for descriptor in FILES.values() for enum in enums_of(descriptor)]
    generated = {short(enum.full_name): {value.name: value.number for value in enum.values} for enum in enums}

    assert generated == wire_table.ENUMS
    assert all(len(values) == len(set(values.values())) for values in generated.values())


def test_services_equal_the_table() -> None:
    """Methods with their messages and streaming sides are those of the table."""
    generated = {
        service.name: {
            method.name: (
                short(method.input_type.full_name),
                short(method.output_type.full_name),
                method.client_streaming,
                method.server_streaming,
            )
            for method in service.methods
        }
        for descriptor in FILES.values()
        for service in descriptor.services_by_name.values()
    }

    assert generated == wire_table.SERVICES


def test_table_fields_equal_the_specification() -> None:
    """The tables of the specification give the same fields, numbers and types as the table kept here."""
    assert read_spec().messages == all_fields()


def test_table_equals_the_specification_beyond_fields() -> None:
    """Oneofs, reserved numbers, enums and services of the specification are those of the table."""
    spec = read_spec()

    assert spec.oneofs == wire_table.ONEOFS
    assert spec.reserved == wire_table.RESERVED
    assert spec.enums == wire_table.ENUMS
    assert spec.services == wire_table.SERVICES


def test_specification_sections_are_the_files() -> None:
    """Each message and top-level enum lies in the .proto file whose section of the specification defines it."""
    generated = {
        name: file
        for file, descriptor in FILES.items()
        for name in [*descriptor.message_types_by_name, *descriptor.enum_types_by_name]
    }

    assert read_spec().files == generated


def test_reserved_numbers_are_low_and_unused() -> None:
    """A reserved number is used by no field, and none is from 100 up, where additions go."""
    for name, reserved in wire_table.RESERVED.items():
        used = {number for number, _ in all_fields()[name].values()}

        assert not used & set(reserved), name
        assert max(reserved) < 100, name
