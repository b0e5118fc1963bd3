"""The package has no import cycles, imports inside functions and those for type checkers alone included."""

import grimp
import networkx


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph("overlap", cache_dir=None)
    imports = networkx.DiGraph(
        (importer, imported)
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
    )
    cycles = [sorted(cycle) for cycle in networkx.strongly_connected_components(imports) if len(cycle) > 1]
    assert not cycles, f"these modules import each other: {cycles}"
