"""Functions on nested state dicts (dicts and lists), under Megatron-LM's names."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from megatron.core.exceptions import UserError

Path = tuple[Hashable, ...]


def nested_items_iter(
    x: dict[Any, Any] | list[Any],
) -> Iterator[tuple[dict[Any, Any] | list[object], Any, object]]:
    """Yields (container, key or index, value) of each value that is neither dict nor list."""
    for key, value in list(x.items() if isinstance(x, dict) else enumerate(x)):
        if isinstance(value, dict | list):
            yield from nested_items_iter(value)
        else:
            yield x, key, value


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[object]:
    """Yields each value that is neither dict nor list."""
    return (value for _, _, value in nested_items_iter(x))


def dict_map(f: Callable[[Any], object], d: dict[Any, Any]) -> None:
    """Replaces the values of one dict, in place. Nested values are left to `f`."""
    for key in d:
        d[key] = f(d[key])


def dict_map_with_key(f: Callable[[Any, Any], object], d: dict[Any, Any]) -> None:
    """Replaces the values of one dict by f(key, value), in place."""
    for key in d:
        d[key] = f(key, d[key])


def dict_list_map_inplace(f: Callable[[Any], Any], x: object) -> Any:
    """Replaces each value that is neither dict nor list, in place. Returns `x`, or f(x) for a single value."""
    if isinstance(x, dict | list):
        for container, key, value in nested_items_iter(x):
            container[key] = f(value)
        return x
    return f(x)


def dict_list_map_outplace(f: Callable[[Any], object], x: object) -> object:
    """Returns a copy in which each value that is neither dict nor list is replaced."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def extract_matching_values(
    x: dict[Any, Any] | list[Any], predicate: Callable[[Any], bool], return_lists_as_dicts: bool = False
) -> tuple[object, object]:
    """Returns two copies of the structure: one with the values that match, and one with the other values. Empty
    containers remain only in the second copy. With `return_lists_as_dicts` lists become dicts by index, so that a value
    keeps its index."""
    matching, others = {}, {}
    for key, value in x.items() if isinstance(x, dict) else enumerate(x):
        if isinstance(value, dict | list):
            match, other = extract_matching_values(value, predicate, return_lists_as_dicts)
            if match:
                matching[key] = match
            if other or not value:
                others[key] = other
        else:
            (matching if predicate(value) else others)[key] = value
    if isinstance(x, list) and not return_lists_as_dicts:
        return list(matching.values()), list(others.values())
    return matching, others


def diff(x1: Any, x2: Any, prefix: Path = ()) -> tuple[list[Path], list[Path], list[tuple[Path, type, type]]]:
    """Returns the paths that only `x1` has, those that only `x2` has, and (path, type, type) where values differ."""
    if type(x1) is type(x2) and isinstance(x1, dict | list):
        left, right = (dict(enumerate(x)) if isinstance(x, list) else x for x in (x1, x2))
        found: tuple[list[Any], list[Any], list[Any]] = (
            [(*prefix, key) for key in left if key not in right],
            [(*prefix, key) for key in right if key not in left],
            [],
        )
        for key in left:
            if key in right:
                only_left, only_right, differing = diff(left[key], right[key], (*prefix, key))
                found[0].extend(only_left)
                found[1].extend(only_right)
                found[2].extend(differing)
        return found
    equal = x1 == x2
    if type(x1) is type(x2) and bool(equal.all() if hasattr(equal, "all") else equal):
        return [], [], []
    return [], [], [(prefix, type(x1), type(x2))]


def merge(x1: object, x2: object, key: Path = ()) -> Any:
    """Adds the values of `x2` to `x1`, in place, and returns `x1`. A dict with whole numbers as keys may be merged into
    a list. Raises UserError if both have a value in one place, or lists have different lengths."""
    if isinstance(x1, dict) and isinstance(x2, dict):
        for name, value in x2.items():
            x1[name] = merge(x1[name], value, (*key, name)) if name in x1 else value
        return x1
    if isinstance(x1, list) and isinstance(x2, dict):
        for name, value in x2.items():
            if not isinstance(name, int) or name > len(x1):
                raise UserError(f"merge: no place for {name!r} in a list of {len(x1)} at {key}")
            x1[name:] = [merge(x1[name], value, (*key, name)), *x1[name + 1 :]] if name < len(x1) else [value]
        return x1
    if isinstance(x1, list) and isinstance(x2, list) and len(x1) == len(x2):
        for index, value in enumerate(x2):
            x1[index] = merge(x1[index], value, (*key, index))
        return x1
    raise UserError(f"merge: two values at {key}: {type(x1).__name__} and {type(x2).__name__}")


def map_reduce(
    xs: Iterable[object],
    key_fn: Callable[[Any], object] = lambda x: x,
    value_fn: Callable[[Any], object] = lambda x: x,
    reduce_fn: Callable[[list[Any]], object] = lambda x: x,
) -> dict[object, object]:
    """Returns, for each key_fn(x), reduce_fn of the list of its value_fn(x), in order."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for x in xs:
        groups[key_fn(x)].append(value_fn(x))
    return {key: reduce_fn(values) for key, values in groups.items()}
