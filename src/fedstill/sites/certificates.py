"""Certificates: an authority of the run, requests made where keys stay, and what is wrong with one.

The only file that imports cryptography.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedstill.core.errors import SiteError
from fedstill.core.files import write_secret, write_whole
from fedstill.sites.credentials import Credentials

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """What signs the certificates of one run; its key stays with the coordinator."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def make_authority(folder: Path, days: int = 3650) -> Authority:
    """A new authority in a folder: `ca.key`, which stays there, and `ca.crt` for everybody."""
    key, name = _new_key(folder / "ca.key"), _name("fedstill authority")
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=False, content_commitment=False, key_encipherment=False,
                data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
                encipher_only=False, decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    write_whole(folder / "ca.crt", made.public_bytes(serialization.Encoding.PEM))
    return Authority(key, made)


def read_authority(folder: Path) -> Authority:
    """The authority that was made in a folder."""
    key = _read_key(folder / "ca.key")
    return Authority(key, _read_certificate(folder / "ca.crt"))


def request(folder: Path, name: str) -> Path:
    """A key that stays here, and a request to have a certificate signed for it."""
    own = Credentials(folder, name)
    key = _read_key(own.key) if own.key.exists() else _new_key(own.key)
    made = x509.CertificateSigningRequestBuilder().subject_name(_name(name))
    path = folder / f"{name}.csr"
    write_whole(
        path, made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )  # fmt: skip
    return path


def signed(
    authority: Authority,
    asked: bytes,
    name: str,
    hosts: Sequence[str] = (),
    days: int | None = 365,
) -> bytes:
    """A certificate for one name and some hosts, whatever else the request says.

    It is valid for so many days, or as long as the authority is.
    """
    try:
        csr = x509.load_pem_x509_csr(asked)
    except ValueError as error:
        raise SiteError(f"the request of {name} cannot be read: {error}; send NAME.csr") from error
    if not csr.is_signature_valid:
        raise SiteError(f"the request of {name} is not signed by its own key; make it again")
    told = csr.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [attribute.value for attribute in told] != [name]:
        said = ", ".join(str(attribute.value) for attribute in told) or "nobody"
        raise SiteError(f"the request is of {said}, but a certificate for {name} is asked for")
    now, last = datetime.now(UTC), authority.certificate.not_valid_after_utc
    most = (last - now).days
    days = most if days is None else days
    if days > most:
        raise SiteError(
            f"a certificate for {days} days would outlive the authority that signs it, which is "
            f"valid until {_day(last)}; give --days {most} or fewer"
        )
    made = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(authority.certificate.subject)
        .public_key(csr.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + days * DAY) - DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name), *map(_host, hosts)]), critical=False
        )
        .add_extension(
            x509.ExtendedKeyUsage(
                [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            ),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
            critical=False,
        )
        .sign(authority.key, hashes.SHA256())
    )
    return made.public_bytes(serialization.Encoding.PEM)


def digest(certificate: Path) -> str:
    """The SHA-256 of a certificate."""
    return _read_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def key_digest(file: Path) -> str:
    """The SHA-256 of the public key in a request or a certificate: equal in both."""
    data = file.read_bytes()
    made: x509.CertificateSigningRequest | x509.Certificate
    if b"CERTIFICATE REQUEST" in data:
        made = x509.load_pem_x509_csr(data)
    else:
        made = _read_certificate(file)
    key = made.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(key).hexdigest()


def public_key(certificate: Path) -> bytes:
    """The key in a certificate, as PEM."""
    found = _read_certificate(certificate).public_key()
    return found.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def for_ssh(certificate: Path) -> bytes:
    """The key in a certificate, in the form of OpenSSH."""
    found = _read_certificate(certificate).public_key()
    return found.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def own_for_ssh(own: Credentials) -> bytes:
    """A party's private key, in the form of OpenSSH."""
    return _read_key(own.key).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )


def faults(own: Credentials, host: str | None = None) -> list[str]:
    """What is wrong with a party's own certificate, a line each; `host` is where it listens."""
    missing = [path for path in (own.authority, own.key, own.certificate) if not path.exists()]
    if missing:
        return [f"{path} is missing" + _what_to_do(path, own) for path in missing]
    root, made = _read_certificate(own.authority), _read_certificate(own.certificate)
    return [*_wrong(own, root, made), *_wrong_host(own, made, host)]


def _wrong(own: Credentials, root: x509.Certificate, made: x509.Certificate) -> Iterator[str]:
    try:
        made.verify_directly_issued_by(root)
    except (InvalidSignature, ValueError, TypeError):
        yield (
            f"{own.certificate} was not signed by the authority in {own.authority}; ask the "
            "coordinator for the certificate of this very run"
        )
    if made.public_key() != _read_key(own.key).public_key():
        yield (
            f"{own.certificate} does not belong to {own.key}; have the request that was made "
            "with this key signed"
        )
    named = [a.value for a in made.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if named != [own.name]:
        yield f"{own.certificate} is for {', '.join(map(str, named))}, not for {own.name}"
    now = datetime.now(UTC)
    first, last = made.not_valid_before_utc, made.not_valid_after_utc
    if not first <= now <= last:
        state = "has expired" if now > last else "is not valid yet"
        yield (
            f"{own.certificate} {state}: it is valid from {_day(first)} to {_day(last)}, and the "
            f"clock here says {_day(now)}; set the clock, or have a new one signed"
        )


def _wrong_host(own: Credentials, made: x509.Certificate, host: str | None) -> Iterator[str]:
    if host is None:
        return
    names = made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    known = {*names.get_values_for_type(x509.DNSName)}
    known |= {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    if str(_host(host).value) not in known:
        yield f"{own.certificate} is for {', '.join(sorted(known))}, not for the address {host}"


def _what_to_do(path: Path, own: Credentials) -> str:
    if path == own.certificate:
        return f"; send {own.name}.csr to the coordinator and put the {path.name} it sends here"
    return "; it came with the invitation, or was made by joining"


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _new_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """A key in a file that nobody else may read; one that is there is not replaced."""
    key = ec.generate_private_key(ec.SECP256R1())
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_secret(path, data)
    return key


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise SiteError(f"{path} is no key that can be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteError(f"{path} is a key of another kind; one over P-256 is expected")
    return key


def _read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SiteError(f"{path} is no certificate that can be read: {error}") from error


def _day(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")
