"""Repositories for what is installed already: TensorFlow's wheel and an MPI."""

_TF = """
package(default_visibility = ["//visibility:public"])

cc_import(
    name = "framework",
    shared_library = "tf/libtensorflow_framework.so.2",
)

cc_import(
    name = "cc",
    shared_library = "tf/libtensorflow_cc.so.2",
)

cc_library(
    name = "tensorflow",
    hdrs = glob([
        "tf/include/**/*.h",
        "tf/include/**/*.hpp",
        "tf/include/**/*.inc",
        "tf/include/Eigen/**",
        "tf/include/unsupported/**",
    ]),
    defines = [
        "_GLIBCXX_USE_CXX11_ABI=1",
        "EIGEN_MAX_ALIGN_BYTES=64",
    ],
    includes = [
        "tf/include",
        "tf/include/external/farmhash_archive/src",
        "tf/include/external/highwayhash",
    ],
    deps = [
        ":cc",
        ":framework",
    ],
)
"""

_MPI = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "mpi",
    hdrs = glob([{headers}]),
    defines = ["OMPI_SKIP_MPICXX", "MPICH_SKIP_MPICXX"],
    includes = [{includes}],
    linkopts = [{linkopts}],
)
"""

def _run(ctx, command):
    result = ctx.execute(command)
    if result.return_code != 0:
        fail("%s failed:\n%s" % (" ".join(command), result.stderr))
    return result.stdout.strip()

# Without importing it, which takes seconds.
_LOCATE = """
import importlib.metadata as m, importlib.util as u
place = list(u.find_spec("tensorflow").submodule_search_locations)[0]
names = sorted(m.packages_distributions()["tensorflow"], key=len)
print(place, *m.version(names[0]).split(".")[:2], sep=chr(10))
"""

def _tensorflow_impl(ctx):
    python = ctx.os.environ.get("PYTHON", "python3")
    place, major, minor = _run(ctx, [python, "-c", _LOCATE]).split("\n")
    ctx.symlink(place + "/include", "tf/include")
    for name in ["libtensorflow_framework.so.2", "libtensorflow_cc.so.2"]:
        ctx.symlink(place + "/" + name, "tf/" + name)
    ctx.file("BUILD", _TF)

    # As in ops/CMakeLists.txt: the oldest TensorFlow whose headers of XLA are known to do.
    ctx.file("version.bzl", "XLA = %s" % ((int(major), int(minor)) >= (2, 21)))

installed_tensorflow = repository_rule(
    implementation = _tensorflow_impl,
    doc = "The TensorFlow that the interpreter named by PYTHON would import.",
    environ = ["PYTHON"],
    local = True,
)

def _quoted(items):
    return ", ".join(['"%s"' % item for item in items])

def _mpi_impl(ctx):
    mpicc = ctx.os.environ.get("MPICC", "mpicc")

    # Open MPI's and MPICH's wrappers both print their whole command on -show.
    includes = []
    linkopts = []
    for flag in _run(ctx, [mpicc, "-show"]).split(" ")[1:]:
        if flag.startswith("-I"):
            name = "include%d" % len(includes)
            ctx.symlink(flag[2:], name)
            includes.append(name)
        elif flag.startswith("-L") or flag.startswith("-l") or flag.startswith("-Wl,"):
            linkopts.append(flag)
    ctx.file("BUILD", _MPI.format(
        headers = _quoted([name + "/mp*.h" for name in includes]),
        includes = _quoted(includes),
        linkopts = _quoted(linkopts),
    ))

installed_mpi = repository_rule(
    implementation = _mpi_impl,
    doc = "The MPI of the compiler wrapper named by MPICC.",
    environ = ["MPICC"],
    local = True,
)
