#!/usr/bin/env bash
# A recent Nix out of Debian's packages, unpacked into a folder: nothing is installed, and no root is needed for this part.
#
#   env/nix/get-nix.sh FOLDER
#   export NIX_CONF_DIR=FOLDER/etc PATH=FOLDER/bin:$PATH
#
# Nix itself keeps its store in /nix, which only root can make; a site does that once (docs/nix.md). Debian 12's own Nix is
# too old for this flake, so the packages of a newer suite (NIX_DEBIAN_SUITE, default trixie) come from the archive that this
# machine already uses, checked by Debian's keyring.

set -euo pipefail

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

[ $# -eq 1 ] || fail "usage: env/nix/get-nix.sh FOLDER"
folder=$(realpath -m -- "$1")
suite=${NIX_DEBIAN_SUITE:-trixie}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[[ $folder != *[[:space:]]* ]] || fail "$folder: found a space; expected a path without one, which apt's options cannot hold."
[ ! -e "$folder" ] || [ -e "$folder/.unpacked" ] || [ -z "$(ls -A -- "$folder")" ] ||
  fail "$folder: found other files in it; expected a new folder. Name another one."
for program in apt-get dpkg-deb; do
  command -v "$program" >/dev/null || fail "found no $program; expected a Debian machine. Elsewhere install Nix by its own installer."
done
[ -r "$keyring" ] || fail "$keyring: not found; expected the package debian-archive-keyring. Install it."
case $(uname -m) in
  x86_64) triplet=x86_64-linux-gnu loader=usr/lib64/ld-linux-x86-64.so.2 ;;
  aarch64) triplet=aarch64-linux-gnu loader=usr/lib/ld-linux-aarch64.so.1 ;;
  *) fail "found $(uname -m); expected x86_64 or aarch64." ;;
esac

rm -rf -- "$folder"
work=$folder/apt root=$folder/root
mkdir -p -- "$work"/{lists/partial,cache/archives/partial} "$root" "$folder"/{bin,etc}
archive=$(apt-get indextargets --format '$(SITE) $(COMPONENT)' 'Created-By: Packages' |
  awk '$2 == "main" && $1 !~ /security/ { print $1; exit }')
[ -n "$archive" ] || fail "apt names no archive with a main component; expected Debian's. Look at /etc/apt/sources.list*."
printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$archive" "$suite" >"$work/sources.list"
: >"$work/status"
options=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::Etc::preferencesparts=/dev/null -o "Dir::State=$work" -o "Dir::State::lists=$work/lists"
  -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache" -o APT::Install-Recommends=false
  -o Acquire::Languages=none -o Debug::NoLocking=1 -o "APT::Sandbox::User=$(id -un)")
apt-get "${options[@]}" update
apt-get "${options[@]}" -y --download-only install nix-bin patchelf >/dev/null
for package in "$work"/cache/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -x -C "$root" --keep-directory-symlink \
    --exclude=./usr/share/doc --exclude=./usr/share/man --exclude=./usr/share/locale \
    --exclude='./usr/share/perl*' --exclude='./usr/lib/*/perl*'
done

# Nix starts itself anew by /proc/self/exe, so the loader and the libraries must stand in the program. RPATH, not RUNPATH: it
# serves the libraries' own needs too, and no LD_LIBRARY_PATH reaches what Nix starts.
libraries=$root/usr/lib/$triplet
"$root/$loader" --library-path "$libraries" "$root/usr/bin/patchelf" \
  --set-interpreter "$root/$loader" --force-rpath --set-rpath "$libraries" "$root/usr/bin/nix"
for name in nix nix-build nix-hash nix-instantiate nix-store nix-shell; do
  ln -s -- ../root/usr/bin/nix "$folder/bin/$name"
done
cat >"$folder/etc/nix.conf" <<'END'
experimental-features = nix-command flakes
build-users-group =
sandbox = false
substitute = false
substituters =
flake-registry =
END
rm -rf -- "$work"
: >"$folder/.unpacked"
"$folder/bin/nix" --version
