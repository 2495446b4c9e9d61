"""TAU2 telecom, the user's side: the state of a phone and its surroundings, set-up and assertions."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from trialogue.benchmarks.tau.records import StrictRecord
from trialogue.benchmarks.toolkit import Plain, Toolkit


class NetworkModePreference(StrEnum):
    FOUR_G_5G_PREFERRED = "4g_5g_preferred"
    FOUR_G_ONLY = "4g_only"
    THREE_G_ONLY = "3g_only"
    TWO_G_ONLY = "2g_only"


class APNNames(StrEnum):
    INTERNET = "internet"
    BROKEN = "broken"


Signal = Literal["none", "poor", "fair", "good", "excellent"]
Technology = Literal["none", "2G", "3G", "4G", "5G"]


class APNSettings(StrictRecord):
    apn_name: APNNames = APNNames.INTERNET
    reset_at_reboot: bool = False
    mms_apn: str | None = "mms"
    mmsc_url: str | None = "http://mms.carrier.com/mms/wapenc"
    mms_proxy: str | None = None
    mms_port: int | None = None


class VpnDetails(StrictRecord):
    server_address: str | None = None
    protocol: str | None = None
    server_performance: Literal["unknown", "poor", "fair", "good", "excellent"] = "unknown"


class AppPermissions(StrictRecord):
    sms: bool = False
    storage: bool = False
    phone: bool = False
    network: bool = False


class AppStatus(StrictRecord):
    app_name: str
    permissions: AppPermissions = AppPermissions()


class PhoneDevice(StrictRecord):
    sim_card_status: Literal["active", "missing", "locked_pin", "locked_puk"] = "active"
    sim_card_missing: bool = False
    airplane_mode: bool = False
    network_signal_strength: Signal = "good"
    network_technology_connected: Technology = "5G"
    network_connection_status: Literal["connected", "searching", "no_service", "emergency_only"] = "connected"
    battery_level: int = 80
    data_enabled: bool = True
    roaming_enabled: bool = False
    network_mode_preference: NetworkModePreference = NetworkModePreference.FOUR_G_5G_PREFERRED
    active_apn_settings: APNSettings = APNSettings()
    wifi_enabled: bool = False
    wifi_connected: bool = False
    wifi_ssid: str | None = None
    wifi_signal_strength: Signal = "none"
    wifi_calling_enabled: bool = False
    wifi_calling_mms_over_wifi: bool = False
    data_saver_mode: bool = False
    vpn_enabled_setting: bool = False
    vpn_connected: bool = False
    vpn_details: VpnDetails | None = None
    app_statuses: dict[str, AppStatus] = {
        "messaging": AppStatus(
            app_name="messaging", permissions=AppPermissions(sms=True, storage=True, phone=True)
        ),
        "browser": AppStatus(app_name="browser", permissions=AppPermissions(network=True, storage=True)),
    }


class PaymentRequest(StrictRecord):
    bill_id: str
    amount_due: float
    paid: bool = False


class Surroundings(StrictRecord):
    name: str | None = None
    phone_number: str | None = None
    is_abroad: bool = False
    roaming_allowed: bool = False
    signal_strength: dict[Technology, Signal] = {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"}
    mobile_data_usage_exceeded: bool = False
    line_active: bool = True
    payment_request: PaymentRequest | None = None


_SIGNS = {
    "none": "📵 No Signal",
    "poor": "📶¹ Poor",
    "fair": "📶² Fair",
    "good": "📶³ Good",
    "excellent": "📶⁴ Excellent",
}
_SPEEDS = {"2G": (0.1, 0.4), "3G": (1.0, 5.0), "4G": (10.0, 100.0), "5G": (50.0, 500.0)}
_FACTORS = {"poor": 0.2, "fair": 0.5, "good": 0.8, "excellent": 1.0}
_GRADES = ((1, "Very Poor"), (5, "Poor"), (25, "Fair"), (100, "Good"))
_STATUSES = ("connected", "searching", "no_service", "emergency_only")
_WANTED = {"4g_only": "4G", "3g_only": "3G", "2g_only": "2G"}


class TelecomPhone(Toolkit):
    """The phone's state and rules. The user's tools are in `telecom_user`."""

    device: Plain
    surroundings: Plain

    shapes = {"device": PhoneDevice, "surroundings": Surroundings}
    generic: ClassVar[frozenset[str]] = frozenset()
    vpn_performance = "excellent"
    """Performance of a new VPN connection. `break_vpn` changes it permanently, as in the benchmark."""

    @classmethod
    def to_record(cls, value: BaseModel) -> Plain:
        return value.model_dump(mode="json")

    def copy_state(self, prepared: Any) -> None:
        self._set_vpn_performance(prepared.vpn_performance)

    def _set_vpn_performance(self, value: str) -> None:
        object.__setattr__(self, "vpn_performance", value)  # not a field: it is not compared

    @property
    def _device(self) -> Plain:
        return self.look("", "device")

    @property
    def _around(self) -> Plain:
        return self.look("", "surroundings")

    def _change(self) -> Plain:
        return self.touch("", "device")

    def _flip(self, name: str) -> bool:
        device = self._change()
        device[name] = not device[name]
        return device[name]

    def _and_status(self, text: str) -> str:
        return f"{text}\nStatus Bar: {self._status_bar()}"

    # -- state ------------------------------------------------------------------------------------------

    def _status_bar(self) -> str:
        device = self._device
        signs: list[str] = []
        technology = device["network_technology_connected"]
        if device["airplane_mode"]:
            signs.append("✈️ Airplane Mode")
        else:
            signs.append(_SIGNS.get(device["network_signal_strength"], _SIGNS["none"]))
            if technology != "none":
                signs.append(technology)
            if device["data_enabled"] and technology != "none":
                signs.append("📱 Data Enabled")
                if device["data_saver_mode"]:
                    signs.append("🔽 Data Saver")
            else:
                signs.append("📵 Data Disabled")
        if device["wifi_enabled"] and device["wifi_connected"]:
            network = device["wifi_ssid"]
            signs.append(f"📡 Connected to {network}" if network else "📡 Enabled")
        if device["vpn_connected"]:
            signs.append("🔒 VPN Connected")
        signs.append(f"🔋 {device['battery_level']}%")
        return " | ".join(signs)

    def _sim(self) -> str:
        device = self._device
        return "missing" if device["sim_card_missing"] else device["sim_card_status"]

    def _has_mobile_data(self) -> bool:
        device, around = self._device, self._around
        if device["airplane_mode"] or device["network_signal_strength"] == "none":
            return False
        if device["network_connection_status"] == "no_service":
            return False
        if around["is_abroad"] and not (device["roaming_enabled"] and around["roaming_allowed"]):
            return False
        return bool(device["data_enabled"]) and not around["mobile_data_usage_exceeded"]

    def _speed(self) -> tuple[float | None, str]:
        """Megabits per second and their rating."""
        if not self._has_mobile_data():
            return None, "No Connection"
        device = self._device
        details = device["vpn_details"]
        is_slow = device["vpn_connected"] and details and details["server_performance"] == "poor"
        factor = 0.1 if is_slow else 1.0
        if device["data_saver_mode"]:
            factor *= 0.2
        low, high = _SPEEDS.get(device["network_technology_connected"], (0.0, 0.0))
        signal = _FACTORS.get(device["network_signal_strength"], 0.0)
        speed = round((low + high) / 2.0 * signal * factor, 2)
        return speed, next((name for limit, name in _GRADES if speed < limit), "Excellent")

    def _can_send_mms(self) -> bool:
        device = self._device
        if not self._has_mobile_data() or device["network_technology_connected"] == "2G":
            return False
        if device["wifi_calling_enabled"] and device["wifi_calling_mms_over_wifi"]:
            return False
        if device["active_apn_settings"]["mmsc_url"] is None:
            return False
        app = device["app_statuses"].get("messaging")
        return app is not None and app["permissions"]["storage"] and app["permissions"]["sms"]

    def _granted(self, app: Plain) -> list[str]:
        return [name for name, allowed in app["permissions"].items() if allowed]

    # -- changes of state ----------------------------------------------------------------------------------

    def simulate_network_search(self) -> None:
        """Connect to the network that SIM card, settings and location allow."""
        device, around = self._change(), self._around
        is_out = (
            self._sim() != "active"
            or device["airplane_mode"]
            or device["active_apn_settings"]["apn_name"] == "broken"
            or not around["line_active"]
        )
        if is_out:
            found = ("no_service", "none", "none")
        else:
            signals = around["signal_strength"]
            preference = device["network_mode_preference"]
            technology = _WANTED.get(preference, "4G") if isinstance(preference, str) else "4G"
            if preference == "4g_5g_preferred" and signals.get("5G", "none") != "none":
                technology = "5G"
            found = ("connected", technology, signals.get(technology, "none"))
        device["network_connection_status"] = found[0]
        device["network_technology_connected"] = found[1]
        device["network_signal_strength"] = found[2]

    def _toggle_airplane_mode(self) -> bool:
        is_on = self._flip("airplane_mode")
        if is_on:
            self._drop_wifi()
            self._disconnect_vpn()
        elif self._device["wifi_enabled"]:
            self._drop_wifi()
        self.simulate_network_search()
        return is_on

    def _toggle_data(self) -> bool:
        is_on = self._flip("data_enabled")
        self.simulate_network_search()
        return is_on

    def _toggle_roaming(self) -> bool:
        is_on = self._flip("roaming_enabled")
        self.simulate_network_search()
        return is_on

    def _drop_wifi(self) -> None:
        self._change().update(wifi_connected=False, wifi_ssid=None, wifi_signal_strength="none")

    def _connect_vpn(self) -> bool:
        if self._device["vpn_connected"]:
            return False
        details = {
            "server_address": "192.168.1.1",
            "protocol": "OpenVPN",
            "server_performance": self.vpn_performance,
        }
        self._change().update(vpn_connected=True, vpn_details=details)
        return True

    def _disconnect_vpn(self) -> bool:
        if not self._device["vpn_connected"]:
            return False
        self._change().update(vpn_connected=False, vpn_details=None)
        return True

    # -- set-up ------------------------------------------------------------------------------------------

    def set_user_info(self, name: str, phone_number: str) -> None:
        self.touch("", "surroundings").update(name=name, phone_number=phone_number)

    def set_user_location(self, abroad: bool) -> None:
        self.touch("", "surroundings")["is_abroad"] = abroad

    def turn_airplane_mode_on(self) -> None:
        if not self._toggle_airplane_mode():
            self._toggle_airplane_mode()

    def turn_airplane_mode_off(self) -> None:
        if self._toggle_airplane_mode():
            self._toggle_airplane_mode()

    def unseat_sim_card(self) -> None:
        self._change()["sim_card_missing"] = True
        self.simulate_network_search()

    def lock_sim_card(self, mode: str) -> None:
        if mode in ("pin", "puk"):
            self._change()["sim_card_status"] = f"locked_{mode}"
        self.simulate_network_search()

    def turn_data_on(self) -> None:
        self._change()["data_enabled"] = True

    def turn_data_off(self) -> None:
        self._change()["data_enabled"] = False
        self.simulate_network_search()

    def turn_roaming_on(self) -> None:
        self._change()["roaming_enabled"] = True
        self.simulate_network_search()

    def turn_roaming_off(self) -> None:
        self._change()["roaming_enabled"] = False
        self.simulate_network_search()

    def turn_data_saver_mode_on(self) -> None:
        self._change()["data_saver_mode"] = True

    def turn_data_saver_mode_off(self) -> None:
        self._change()["data_saver_mode"] = False

    def break_apn_settings(self) -> None:
        self._change()["active_apn_settings"]["apn_name"] = "broken"
        self.simulate_network_search()

    def break_apn_mms_setting(self) -> None:
        self._change()["active_apn_settings"]["mmsc_url"] = None

    def set_wifi_calling(self, enabled: bool, mms_over_wifi: bool | None = None) -> None:
        device = self._change()
        if device["wifi_calling_enabled"] != enabled:
            device["wifi_calling_enabled"] = not device["wifi_calling_enabled"]
        if mms_over_wifi is not None:
            device["wifi_calling_mms_over_wifi"] = mms_over_wifi

    def break_vpn(self) -> None:
        if self._connect_vpn():
            self._set_vpn_performance("poor")
        self._change()["vpn_details"]["server_performance"] = "poor"

    def remove_app_permission(self, app_name: str, permission: str) -> None:
        permission = permission.lower()
        app = self._change()["app_statuses"].get(app_name)
        if app is not None and permission in app["permissions"]:
            app["permissions"][permission] = False

    # -- assertions --------------------------------------------------------------------------------------

    def assert_airplane_mode_status(self, expected_status: bool) -> bool:
        return self._device["airplane_mode"] == expected_status

    def assert_service_status(self, expected_status: str) -> bool:
        if expected_status not in _STATUSES:
            raise ValueError(f"{expected_status!r} is not a valid NetworkStatus")
        return self._device["network_connection_status"] == expected_status

    def assert_mobile_data_status(self, expected_status: bool) -> bool:
        return self._has_mobile_data() == expected_status

    def assert_mobile_roaming_status(self, expected_status: bool) -> bool:
        return self._device["roaming_enabled"] == expected_status

    def assert_mobile_data_saver_mode_status(self, expected_status: bool) -> bool:
        return self._device["data_saver_mode"] == expected_status

    def assert_internet_speed(self, expected_speed: float, expected_desc: str | None = None) -> bool:
        speed, grade = self._speed()
        is_fast = (speed or 0.0) >= expected_speed
        return is_fast and (expected_desc is None or grade.lower() == expected_desc.lower())

    def assert_internet_not_excellent(self) -> bool:
        return self._speed()[1].lower() != "excellent"

    def assert_can_send_mms(self, expected_status: bool) -> bool:
        return self._can_send_mms() == expected_status

    def assert_mobile_data_usage_exceeded(self, expected_status: bool) -> bool:
        return self._around["mobile_data_usage_exceeded"] == expected_status
